"""The decode loop: draft, score, verify, commit, with per-sequence state and the checks made on each step."""
