"""What draft, target and coordinator must compute alike: distributions, sampling, randomness, the wire codec."""
