"""``crossdraft verify-engine``."""
