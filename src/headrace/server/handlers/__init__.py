"""One module per API family, each with the behaviour and the omissions written at its head."""
