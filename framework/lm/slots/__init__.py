"""Slots of models that one ragged cache does not suffice for."""
