"""Weight matrices held in int8 or nf4, the layers over them, and their cache on disk."""
