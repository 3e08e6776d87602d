"""What every drafter that draws token after token holds: a draft model, a length policy, chains and trees."""
