"""Block efficiency from recorded responses, without decoding."""
