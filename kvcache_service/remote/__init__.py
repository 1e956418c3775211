"""What cache services share: a distributed store that somebody else keeps, below the tiers of each."""
