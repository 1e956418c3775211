"""An index that several cache services share."""
