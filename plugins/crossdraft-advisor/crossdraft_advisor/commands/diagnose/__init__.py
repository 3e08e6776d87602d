"""``crossdraft diagnose``: the likely cause of a low acceptance rate."""
