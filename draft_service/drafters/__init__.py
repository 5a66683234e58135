"""The ways of drafting, one file each. A file is registered by its `KIND`; nothing else names it."""
