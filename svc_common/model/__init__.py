"""Which model: where its files are, what shape it has, how its text becomes tokens. No torch here."""
