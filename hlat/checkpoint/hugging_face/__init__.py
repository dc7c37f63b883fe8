"""Files of Hugging Face directories: weights, tokenizer, generation settings, chat template.

The keys of config.json are in hlat/model/families/.
"""
