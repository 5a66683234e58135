"""The workers at one address: found by name, watched by probes, chosen by session, left out while they fail."""
