"""The contract between the services (`*/v1`), and what all of them need to speak it."""
