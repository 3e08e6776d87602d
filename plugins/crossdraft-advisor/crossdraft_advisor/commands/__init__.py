"""Commands of crossdraft-advisor."""
