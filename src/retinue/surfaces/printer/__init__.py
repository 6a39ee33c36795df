"""The block printer: what the surfaces for people share. Turns blocks and outlines into safe text on a terminal."""
