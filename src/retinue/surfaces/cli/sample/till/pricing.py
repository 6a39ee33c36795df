"""From what is in the cart to what is to be paid, in cents."""

DISCOUNT_FROM = 100_00
DISCOUNT_PERCENT = 10


def discount(subtotal: int) -> int:
    """An order of DISCOUNT_FROM or more gets DISCOUNT_PERCENT off."""
    if subtotal > DISCOUNT_FROM:
        return subtotal * DISCOUNT_PERCENT // 100
    return 0


def total(subtotal: int) -> int:
    return subtotal - discount(subtotal)
