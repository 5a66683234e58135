"""The formats in which heads are published: read and written."""
