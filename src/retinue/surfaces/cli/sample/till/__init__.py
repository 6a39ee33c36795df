"""A small shop's till: a cart, prices, a receipt."""
