"""Makes the embedded model; not part of the product. Commands: `python -m train.NAME`, see README.md."""
