"""Other routers' policies and scalers, written from what they publish, to compare with. One file each."""
