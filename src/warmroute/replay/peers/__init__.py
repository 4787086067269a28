"""Other routers' rules, written from what they publish (FACTS.md), to compare with. One small file each."""
