"""What libp2p uses of fastecdsa 2.3: keys of the curve P-256 and their Diffie-Hellman exchange, over `cryptography`.

It stands where fastecdsa itself, which has to be compiled, is not installed (packaging/build_backend.py). libp2p
imports it for its secio transport and P-256 keys, neither of which petalnode uses. Names and signatures are those of
fastecdsa; OpenSSL does all arithmetic with secrets.
"""
