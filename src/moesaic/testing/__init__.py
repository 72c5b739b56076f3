"""Factories and fakes for tests; the product never imports them."""
