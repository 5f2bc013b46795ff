"""Generated: the messages of buf/validate/validate.proto."""
