import unittest

from cart import total


class CartTest(unittest.TestCase):
    def test_discount(self):
        self.assertEqual(total([80, 120], 10), 180)
