"""Surfaces: the ways in and out for people and programs. A surface reads views and sends commands to a Control."""
