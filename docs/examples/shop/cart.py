def total(prices, discount):
    """Return the sum of the prices, less a discount in percent."""
    return sum(prices) - discount
