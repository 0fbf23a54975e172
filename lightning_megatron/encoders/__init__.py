"""Encoders: BERT and T5. Nothing below knows them; they are found as families of any other package are."""
