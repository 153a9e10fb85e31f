"""How updates travel: the parameter store's server, its client, and the words between them."""
