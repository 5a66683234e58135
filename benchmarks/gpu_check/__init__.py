"""`make gpu-check`: everything about a GPU that tests on a CPU cannot say, in one report."""
