"""Programs that show what the tests cannot: the distribution through the network, and speed."""
