"""The sections of `retinue doctor`: one module each, with `checks(look)`. None of them changes anything."""
