"""What every service shares: serving, channels, errors, interceptors, logging, settings."""
