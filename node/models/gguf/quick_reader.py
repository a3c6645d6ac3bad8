"""The `gguf` package's reader, without five arrays of numpy for each token and merge of a vocabulary.

transformers reads all of a file's metadata with it, three times until configuration and tokenizer are there. Whoever
imports this module has it do so in a tenth of the time.
"""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
from gguf import GGUFValueType


class QuickReader(gguf.GGUFReader):
    """With the same fields."""

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[GGUFValueType]]:
        """
        Raises:
            ValueError: an array passes the end of the file.
        """
        if raw_type != GGUFValueType.ARRAY or self.byte_order != "I":
            return super()._get_field_parts(orig_offs, raw_type)
        kind, count = self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)
        of, number, end = GGUFValueType(kind[0]), int(count[0]), orig_offs + 12
        values: list[Any] = []
        if of == GGUFValueType.STRING:
            view = memoryview(self.data)
            for _ in range(number):
                length = int.from_bytes(view[end : end + 8], "little")
                if end + 8 + length > len(view):
                    raise ValueError("an array of texts passes the end of the file")
                size, text = np.frombuffer(view, np.uint64, 1, end), np.frombuffer(view, np.uint8, length, end + 8)
                values += (size, text)
                end += 8 + length
            places = range(3, 3 + 2 * number, 2)
        elif of in self.gguf_scalar_to_np:
            whole = self._get(end, self.gguf_scalar_to_np[of], number)
            if len(whole) != number:
                raise ValueError("an array passes the end of the file")
            values.extend(whole.reshape(-1, 1))
            end += whole.nbytes
            places = range(2, 2 + number)
        else:  # of arrays
            return super()._get_field_parts(orig_offs, raw_type)
        return end - orig_offs, [kind, count, *values], [*places], [GGUFValueType.ARRAY, *([of] if number else [])]


gguf.GGUFReader = QuickReader
