"""What draft, target and coordinator must compute identically: distributions, sampling, randomness, the wire codec."""
