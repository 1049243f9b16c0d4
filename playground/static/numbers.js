// How numbers are written: without decimals, with one, with two; a dash where there is none.

const decimals = (digits) => new Intl.NumberFormat("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
export const whole = decimals(0);
export const one = decimals(1);
export const two = decimals(2);
export const orDash = (value, format) => (value === null ? "–" : format(value));
