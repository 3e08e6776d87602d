"""Cost of a speculative step, from measured speeds or from what others measured."""
