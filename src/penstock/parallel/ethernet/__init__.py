"""Communication over Ethernet: gathers ahead, reductions in the background, compression."""
