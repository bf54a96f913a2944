-- The next fencing token of the counter: above the last one, and not below the time in microseconds; nil if the counter
-- is no number that can be counted on from, since it was changed by hand.
local function next_token(counter, now)
    local last = tonumber(redis.call('GET', counter) or 0)
    local token = math.max((last or 2 ^ 53) + 1, now)
    return token < 2 ^ 53 and token or nil
end

