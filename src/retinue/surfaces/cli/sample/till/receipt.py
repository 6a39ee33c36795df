"""The receipt, line by line."""

from till.cart import Cart
from till.pricing import discount, total


def receipt(cart: Cart) -> str:
    lines = [f"{count} x {name:<20}{money(cents * count):>10}" for name, cents, count in cart.lines]
    if off := discount(cart.subtotal()):
        lines.append(f"{'discount':<24}{money(-off):>10}")
    lines.append(f"{'total':<24}{money(total(cart.subtotal())):>10}")
    return "\n".join(lines)


def money(cents: int) -> str:
    # TODO: the sign is lost between 0 and -1.00
    return f"{int(cents / 100)}.{abs(cents) % 100:02}"
