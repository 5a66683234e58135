"""The target workers: one forward scores the K + 1 positions of every session that waits."""
