"""`specdec plan`: how many draft tokens pay, by formula and by simulation."""
