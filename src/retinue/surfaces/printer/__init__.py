"""The printer, shared by the surfaces for people: blocks and outlines as safe text on a terminal."""
