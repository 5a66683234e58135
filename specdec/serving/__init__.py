"""What every service process shares: servers, channels, settings, logs, metrics, supervision."""
