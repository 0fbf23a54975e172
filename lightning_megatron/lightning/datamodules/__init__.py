"""Data modules: text, chats, and pairs for BERT and T5."""
