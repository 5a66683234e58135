"""The documentation as a site, and the parts of docs/ that are generated."""
