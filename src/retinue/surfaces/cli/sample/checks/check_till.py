"""What the till promises."""

import unittest

from till.cart import Cart
from till.pricing import total
from till.receipt import receipt


class Till(unittest.TestCase):
    def test_a_small_order_pays_in_full(self):
        self.assertEqual(total(99_99), 99_99)

    def test_a_large_order_gets_ten_percent_off(self):
        self.assertEqual(total(250_00), 225_00)

    def test_an_order_of_exactly_100_gets_it_too(self):
        self.assertEqual(total(100_00), 90_00)

    def test_the_receipt_ends_with_the_total(self):
        cart = Cart()
        cart.add("teapot", 80_00, 2)
        self.assertTrue(receipt(cart).endswith("144.00"))


if __name__ == "__main__":
    unittest.main()
