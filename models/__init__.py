"""The demo pair, a real target, heads for both, and the scripts that make them."""
