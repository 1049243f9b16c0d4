"""First words that give own-words data its variety.

Left to itself a small chat model asks a few kinds of questions over and over. Questions that begin with one of these
go elsewhere; the model continues them in its own words. The texts are begun as they are, without a template. All are
of our own making; none comes from a data set.
"""

QUESTION_OPENINGS = (
    "Write a Python function that", "Write a function to", "Write a short story about", "Write a poem about",
    "Write an email to", "Write a short essay on", "Write a blog post about", "Write a product description for",
    "Write a program that", "Write a SQL query", "Write a test for", "Write a dialogue between", "Explain how",
    "Explain why", "Explain the difference between", "Explain to a child what", "Describe", "Describe a scene where",
    "Summarize", "Summarize the following text:", "Translate the following sentence into", "List", "List five",
    "List the steps to", "Give me three examples of", "Give me tips for", "Give me a recipe for", "Create a table of",
    "Create a plan for", "Create a list of", "Compare", "Compare and contrast", "Classify the following", "Correct the",
    "Rewrite the following sentence", "Rewrite this paragraph so that", "Imagine you are", "Pretend to be a",
    "You are a", "Suggest", "Design a", "Prove that", "Solve the equation", "Solve:", "Calculate", "Find the value of",
    "Find the error in this code:", "How do I", "How does", "How many", "How much", "How can I fix", "What is",
    "What is the difference between", "What are the main", "What happens when", "What would happen if", "What should I",
    "When did", "Where can I find", "Which of these", "Who was", "Who invented", "Why is", "Why do", "Can you",
    "Could you explain", "Is it true that", "Should I", "Tell me about", "Tell me a joke about", "Help me", "I have a",
    "I am trying to", "I want to learn", "My friend", "Today I", "In Python, how do I", "In history,", "In chemistry,",
    "In economics,", "Extract the names from", "Answer with one word:", "Complete the sentence:", "Continue the story:",
    "Anna has", "A farmer has", "A shop sells", "A train leaves", "A baker makes", "There are", "If a car travels",
    "Tom buys", "Each of the", "Every day,", "A rectangle has", "The sum of two numbers", "A class of",
)  # fmt: skip

QUESTION_CODE_OPENINGS = (
    "def ", "def count_", "def is_", "def find_", "from typing import List\n\n\ndef ", "import math\n\n\ndef ",
    "Complete this function:\n\ndef ", "Complete this Python code:\n\n", "What does this code do?\n\n",
    "Fix this code:\n\n", "class ", "```python\n", "Here is a function:\n\ndef ", "def sum_", "def sort_", "def get_",
    "Implement the following function:\n\ndef ",
)  # fmt: skip

CODE_OPENINGS = (
    "def ", "import ", "class ", "from typing import List\n\n\ndef ", "import numpy as np\n\n",
    "import os\nimport sys\n",
    "#!/usr/bin/env python3\n", "#!/bin/bash\n", "#include <stdio.h>\n\nint ", "#include <vector>\n", "public class ",
    "package main\n\nimport ", "fn main() {\n", "use std::", "function ", "const ", "export default ", "SELECT ",
    "CREATE TABLE ", "<!DOCTYPE html>\n<html>\n", "{\n  \"name\": ", "def main():\n", "for i in range(", "@app.route(",
    "import torch\nimport torch.nn as nn\n\n\nclass ", "async def ", "def test_", "try:\n", "# Python program to ",
    "\"\"\"", "def fibonacci(n):\n", "def is_prime(n):\n", "let ", "interface ", "struct ", "if __name__ ==",
)  # fmt: skip

TEXT_OPENINGS = (
    "The ", "In the ", "Once upon a time", "It was ", "When ", "A ", "There is ", "According to ", "After the ",
    "During the ", "One of the most ", "The history of ", "The capital of ", "In this article, we ", "How to ",
    "# Introduction\n\n", "## ", "1. ", "- ", "Chapter 1\n\n", "Abstract\n\n", "Dear ", "Question: ", "Q: ", "Step 1: ",
    "Theorem. ", "Ingredients:\n", "\"", "She ", "He ", "My ", "We ", "If ", "Although ", "As a ", "Scientists ",
    "Water ", "People ", "On the first day", "To solve this problem, ", "Let x be ", "The following table shows ",
)  # fmt: skip
