"""The contracts (draft, drafter, verifier), the decode loop, the bench and the command line."""
