"""`specdec trace`: one request's spans over all processes, as a file for Perfetto and a table of phases."""
