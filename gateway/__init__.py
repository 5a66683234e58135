"""The gateway: OpenAI's HTTP interface in front of coordinators. It keeps nothing and computes nothing."""
