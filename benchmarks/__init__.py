"""Programs that show what the tests cannot: the law through the network, and speed."""
